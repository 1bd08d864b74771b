"""What the store and gc measure of themselves."""
