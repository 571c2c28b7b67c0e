"""The command line, with one file per command. Modules here do not import torch until a command runs."""

from culet.child import leave_working_directory

leave_working_directory()  # before click and everything else is imported
