"""Looking at patterns and runs."""
