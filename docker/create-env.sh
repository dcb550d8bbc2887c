#!/bin/sh
# create-env.sh FILE: write random secrets for docker/compose.yaml. An existing file is not changed.
set -eu
umask 077

if [ -e "$1" ]; then echo "$1 exists and is not changed"; exit; fi
# The first two are set when the database is new; changing them later takes more than this file.
for name in POSTGRES_PASSWORD MLFLOW_ADMIN_PASSWORD MLFLOW_FLASK_SERVER_SECRET_KEY MLFLOW_CRYPTO_KEK_PASSPHRASE \
  RAY_AUTH_TOKEN; do
  echo "$name=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
done >"$1.new"
mv "$1.new" "$1"
echo "$1: new secrets, readable by you alone"
