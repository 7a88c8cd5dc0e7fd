"""A statistic of the slots that goes on from the queries before a block."""
