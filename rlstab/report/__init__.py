"""Reading finished runs: records, statistics with intervals, collapse, idle methods, and the pages made of them."""
