"""What the tests share stands in tests/support."""

pytest_plugins = ["leaks", "command", "launched", "census", "attempts", "s3", "baking"]
