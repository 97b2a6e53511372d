"""A world to run vk-cocoon in, without hardware."""
