"""The broker process, its workers and its loader. Applications import `clientlib`, never this package."""
