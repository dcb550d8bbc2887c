"""What the tests share stands in tests/support."""

pytest_plugins = ["leaks", "cost", "groups", "command", "launched", "census", "attempts", "s3", "baking", "recordings"]
