"""`Plan` and its methods: explain, diff, what_if, and operators that stay unsharded."""
