"""Reading finished runs: records, statistics with intervals, collapse, inert methods, and the pages made of them."""
