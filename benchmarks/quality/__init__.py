"""The models on which merging methods are judged: trained here, converted by every method, uptrained, and reported."""
