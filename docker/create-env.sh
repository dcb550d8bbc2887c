#!/bin/sh
# create-env.sh FILE: write random secrets for docker/compose.yaml. An existing file is not changed.
set -eu
umask 077

file=$1
if [ -e "$file" ]; then
  echo "$file exists and is not changed"
  exit 0
fi

secret() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

cat >"$file.new" <<ENV
# Secrets of the compose cluster. The first two are set when the database is new; changing them later takes more than
# this file, see docs/distributed.md.
POSTGRES_PASSWORD=$(secret)
MLFLOW_ADMIN_PASSWORD=$(secret)
MLFLOW_FLASK_SERVER_SECRET_KEY=$(secret)
MLFLOW_CRYPTO_KEK_PASSPHRASE=$(secret)
RAY_AUTH_TOKEN=$(secret)
ENV
mv "$file.new" "$file"
echo "$file: new secrets, readable by you alone"
