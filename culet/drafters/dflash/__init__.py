"""DFlash drafters, which have their own pages."""
