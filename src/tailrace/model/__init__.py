"""Tables, changes and values, as every part of tailrace knows them."""
