"""The dashboard: a page, a JSON API and metrics over the state stores of pipelines. No Spark, no connection upstream.

`WatchedPipeline` reads a store at most once a second however many look, `DashboardApplication` answers requests,
`Guard` decides which requests are answered at all, `serve` listens.
"""
