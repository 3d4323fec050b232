"""The maths of merging K/V heads: arrays in, arrays out. Nothing here knows of files, configs or torch."""
