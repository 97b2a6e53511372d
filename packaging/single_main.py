# The first step of the single file, before anything is unpacked. Any Python 3 can read it, so that each is answered in
# one line; `@...@` is filled in when the file is built. Unpacking may fail (a full disk, a cache nobody may write),
# and says so instead of showing a traceback; what it left half done is taken away.
import os
import platform
import shutil
import sys

MINOR, MACHINE = "@MINOR@", "@MACHINE@"


def end(text, code):
    sys.stderr.write("vk-cocoon: %s\n" % text)
    sys.exit(code)


def check():
    minor, machine = "%d.%d" % sys.version_info[:2], platform.machine()
    if (minor, machine) != (MINOR, MACHINE):
        what = "this file is for Python %s on %s, and this is Python %s on %s" % (MINOR, MACHINE, minor, machine)
        end("%s; run it as: python%s %s" % (what, MINOR, sys.argv[0]), 1)


def unpack():
    from _bootstrap import cache_path, current_zipfile, extract_site_packages
    from _bootstrap.environment import Environment

    with current_zipfile() as archive:
        env = Environment.from_json(archive.read("environment.json").decode())
        target = cache_path(archive, env.root, env.build_id)
        if os.path.isdir(str(target / "site-packages")) and not env.force_extract:
            return
        try:
            extract_site_packages(archive, target, env.compile_pyc, env.compile_workers, env.force_extract)
        except OSError as error:
            shutil.rmtree(str(target) + ".tmp", ignore_errors=True)
            why = error.strerror or str(error)
            end("cannot unpack into %s: %s; SHIV_ROOT names another place, 200 MB are enough" % (target.parent, why), 1)


if __name__ == "__main__":
    check()
    unpack()
    from _bootstrap import bootstrap

    bootstrap()
