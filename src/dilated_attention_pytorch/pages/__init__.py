"""Pages that need nothing else: charts as SVG, and the HTML around them."""
