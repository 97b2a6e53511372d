"""First the monkey patch, before anything that opens a socket; then what every test file shares."""

from gevent import monkey

monkey.patch_all()

import freezegun  # noqa: E402

# kubernetes loads its models lazily, and its validation library does not accept a fake datetime class while it does.
freezegun.configure(extend_ignore_list=["kubernetes"])
