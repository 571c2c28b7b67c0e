"""DFlash drafters: they keep pages of their own."""
