"""Which layers stay resident, which tier each layer gets, and what that costs."""
