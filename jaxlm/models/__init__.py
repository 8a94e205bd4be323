"""The two language models, their depth draws and their cost."""
