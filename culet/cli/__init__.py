"""The command line, with one file per command. Modules here do not import torch until a command runs."""
