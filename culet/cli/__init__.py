"""The command line: one file per command. Modules here import without torch until a command runs."""
