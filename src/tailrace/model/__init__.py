"""The data model that all parts of tailrace share: tables, changes and values."""
