"""The pages for operators, under `/admin`: rendered here, with htmx from its package, and no asset of another host.

Every page works without script; script only saves it a reload. The same data is JSON under `/admin/api`, for programs.
"""
