#!/bin/sh
# certificates.sh NAMESPACE [FOLDER]: makes an authority, the members' certificate and the jobs', and puts them into the
# Secrets elaunch-etcd-server and elaunch-etcd-client of the namespace. Called again for the same FOLDER, as before they
# expire, it makes new certificates of the same authority; then: kubectl rollout restart statefulset/elaunch-etcd
#
# FOLDER (elaunch-etcd-NAMESPACE; made, mode 0700) keeps the authority's key: put it away safely. Needs openssl and
# kubectl; with KUBECTL= (empty) it only writes the files.
set -eu
namespace=${1:?usage: certificates.sh NAMESPACE [FOLDER]}
folder=${2:-elaunch-etcd-$namespace}
days=825
service=elaunch-etcd
umask 077
mkdir -p "$folder"
cd "$folder"

if [ ! -e ca.key ]; then
    openssl ecparam -name prime256v1 -genkey -noout -out ca.key
    openssl req -x509 -new -key ca.key -sha256 -days 3650 -subj "/O=elaunch/CN=elaunch-etcd $namespace" -out ca.crt
fi

names="DNS:localhost,IP:127.0.0.1,IP:::1,DNS:$service"
for host in "$service" "$service-0.$service" "$service-1.$service" "$service-2.$service"; do
    for domain in "" ".$namespace" ".$namespace.svc" ".$namespace.svc.cluster.local"; do
        names="$names,DNS:$host$domain"
    done
done

# sign NAME EXTENSIONS. The name of the subject is an organisation, no common name: etcd would take that for a user's.
sign() {
    openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
    openssl req -new -key "$1.key" -subj "/O=elaunch $1" -out "$1.csr"
    printf '%s\n' "$2" >"$1.ext"
    # It has something to say at its success, too.
    said=$(openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -sha256 -days "$days" \
        -extfile "$1.ext" -out "$1.crt" 2>&1) || { printf '%s\n' "$said" >&2; exit 1; }
    rm "$1.csr" "$1.ext"
}

# A member is a client of the others, and its JSON gateway one of itself.
sign server "basicConstraints=CA:FALSE
extendedKeyUsage=serverAuth,clientAuth
subjectAltName=$names"
sign client "basicConstraints=CA:FALSE
extendedKeyUsage=clientAuth"

kubectl=${KUBECTL-kubectl}
[ -n "$kubectl" ] || exit 0
for who in server client; do
    "$kubectl" create secret generic "$service-$who" --namespace "$namespace" --dry-run=client --output yaml \
        --from-file=ca.crt --from-file=tls.crt="$who.crt" --from-file=tls.key="$who.key" |
        "$kubectl" apply --filename -
done
