"""Topics of Kafka: each change as a record, in Debezium's envelope, exactly once."""
