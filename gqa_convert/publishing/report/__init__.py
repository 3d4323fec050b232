"""Reports: what convert, uptrain, evaluate and benchmark have written, as tables and plots."""
