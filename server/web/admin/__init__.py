"""The pages for operators under `/admin`.

Rendered on the server from `templates/admin/`. Every page works without scripts; htmx, from its package, only saves
reloads, and nothing is loaded from another host. All text is escaped. A page needs a session (`sessions`), a form also
a CSRF token, and every change is audited. Programs get the same data as JSON under `/admin/api`. Public surface:
`site.build_pages` and `page_errors.answer_any_exception`, which `web.app` uses.
"""
