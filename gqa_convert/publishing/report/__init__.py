"""Reports: the results of convert, uptrain, evaluate and benchmark as tables and plots."""
