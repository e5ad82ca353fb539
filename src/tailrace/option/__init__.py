"""What the options of sources, destinations and pipelines are made of."""
