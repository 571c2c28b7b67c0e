"""DFlash drafters: they have their own pages."""
