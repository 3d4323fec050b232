"""What a conversion loses and what it gains, and which number of groups to choose."""
