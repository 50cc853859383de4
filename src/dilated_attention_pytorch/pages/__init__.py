"""Charts and pictures by matplotlib, and HTML pages that need no other file."""
