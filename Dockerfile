FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source

# The dependencies first: they change less often than the code. No pip in the environment that is kept.
COPY requirements/build.txt requirements/run.txt requirements/
RUN python -m venv --without-pip /opt/strata \
    && pip --python /opt/strata/bin/python install --require-hashes -r requirements/run.txt \
    && pip install --require-hashes -r requirements/build.txt

COPY pyproject.toml README.md LICENSE alembic.ini ./
COPY migrations migrations
COPY templates templates
COPY server server
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel . \
    && pip --python /opt/strata/bin/python install --no-deps /wheel/*.whl


FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --home-dir /var/lib/strata --create-home --shell /usr/sbin/nologin strata
COPY --from=build /opt/strata /opt/strata
ENV PATH=/opt/strata/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    STRATA_DATA_DIR=/var/lib/strata \
    STRATA_LOG_FORMAT=json
USER strata
WORKDIR /var/lib/strata
EXPOSE 8400
STOPSIGNAL SIGTERM
# Not urllib: it would ask the proxy that the environment may name.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('STRATA_PORT') or 8400), timeout=4); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["strata"]
CMD ["serve", "--host", "0.0.0.0"]
