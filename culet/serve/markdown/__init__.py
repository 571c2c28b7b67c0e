"""Turn the Markdown of answers into trees for the web page, in a process of its own."""
