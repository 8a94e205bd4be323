"""From text to windows of tokens on the device."""
