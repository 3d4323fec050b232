"""What merging K/V heads would cost, layer by layer, before anything is converted."""
