"""The pages for operators under `/admin`.

Pages are rendered on the server from `templates/admin/`. Every page works without scripts; htmx, which is served from
this package, only avoids reloads, and nothing is loaded from another host. All text is escaped. A page needs a session
(`sessions`), a form also a CSRF token, and every change is audited. Programs get the same data as JSON under
`/admin/api`. `web.app` uses `site.build_pages` and `page_errors.answer_any_exception`.
"""
