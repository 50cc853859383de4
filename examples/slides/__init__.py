"""Synthetic slides whose label no set of tiles tells, only where the tiles lie."""
