"""What one search is of: worker types, limits, prices, and what is known of the traffic before it begins."""
