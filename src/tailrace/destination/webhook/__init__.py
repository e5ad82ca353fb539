"""Changes as HTTP requests: encoded to events, kept in a durable queue, posted in order by the node that leads."""
