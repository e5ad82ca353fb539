"""What tailrace asks of the operating system."""
