"""What destinations that keep tables as data files share: the index of the keys in those files."""
