"""`tailrace verify`: does the destination hold what the source holds?"""
