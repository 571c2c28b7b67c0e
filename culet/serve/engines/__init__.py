"""One or several engines behind one server: starting and restarting them, and which one gets a request."""
