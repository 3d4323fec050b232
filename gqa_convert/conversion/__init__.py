"""From a source checkpoint to a grouped-query one: plan, merge, write."""
