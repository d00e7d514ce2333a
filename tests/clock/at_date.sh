#!/bin/sh
# Runs a command on another date, which every process that it starts sees too:
#
#     tests/clock/at_date.sh "+2 years" .venv/bin/pytest tests/unit
#
# The date is one that `date -d` reads: "+60 days", "2028-02-29 23:58". Needs Linux, util-linux and a C compiler.
# The library is loaded through an /etc/ld.so.preload that only this command sees, since LD_PRELOAD would not reach
# processes that are started with an environment of their own: Postgres, its warden, the template worker.
set -eu
began_at=$(date +%s)
seconds=$(($(date -d "$1" +%s) - began_at))
shift
here=$(dirname "$0")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir "$place/layer"
chmod 755 "$place"
cc -Wall -Wextra -Werror -O2 -shared -fPIC -DSHIFT_SECONDS="($seconds)" -DBEGAN_AT="$began_at" \
    -o "$place/shifted_clock.so" "$here/shifted_clock.c" -ldl
# Who is not root may mount in a user namespace.
as_user=$(test "$(id -u)" = 0 || echo --user --map-current-user --keep-caps)
# shellcheck disable=SC2086  # none or several options
unshare $as_user --mount --propagation private sh -euc '
    place=$1
    shift
    mount -t tmpfs tmpfs "$place/layer"
    mkdir -m 755 "$place/layer/upper" "$place/layer/work"
    mount -t overlay overlay -o "lowerdir=/etc,upperdir=$place/layer/upper,workdir=$place/layer/work" /etc
    echo "$place/shifted_clock.so" >/etc/ld.so.preload
    exec "$@"
' sh "$place" "$@"
