"""Jobs: folders that are made shard by shard, by one process or by many."""
