"""Programs for people who work on tailrace: the documentation's site and its reference."""
