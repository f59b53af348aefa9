"""The host thread that updates layers while the next step runs."""
