#!/bin/sh
# build.sh FOLDER: makes kube-apiserver, kube-controller-manager and kube-scheduler 1.20.2 in FOLDER/bin, from the source
# package of Debian 12 and with its Go: 35 MB to fetch, some minutes on two cores. Done once; `make control-plane` calls it.
# Root installs Go; nothing else of the machine changes, its lists of packages included.
set -eu
folder=$(readlink -m "$1")
[ ! -e "$folder/bin/kube-scheduler" ] || exit 0
work=$folder/work
mkdir -p "$work/lists/partial" "$work/gopath/src/k8s.io"
cd "$work"

go=/usr/lib/go-1.19/bin/go
[ -x $go ] || DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install golang-1.19-go >/dev/null

if [ ! -d source ]; then
    uri=$(apt-get indextargets --format '$(REPO_URI)' 'Codename: bookworm' | grep -v security | head -n 1)
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri bookworm main" >sources.list
    own="-o Dir::Etc::SourceList=$work/sources.list -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists=$work/lists"
    # shellcheck disable=SC2086
    apt-get -qq $own update
    # shellcheck disable=SC2086
    apt-get -qq $own source --download-only kubernetes
    mkdir partial
    tar xf kubernetes_*.orig.tar.* -C partial --strip-components=1
    mv partial source
fi

ln -sfn "$work/source" gopath/src/k8s.io/kubernetes
export GOPATH="$work/gopath" GOCACHE="$work/cache" GO111MODULE=off CGO_ENABLED=0
cd gopath/src/k8s.io/kubernetes
# The one generated file that the package leaves out: the schemas of all kinds.
$go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
kinds=$(grep -rl "+k8s:openapi-gen=true" --include=*.go staging/src/k8s.io/*/ pkg/ | xargs -n1 dirname | sort -u |
    sed 's#^staging/src/##; s#^pkg/#k8s.io/kubernetes/pkg/#' | grep -vE "code-generator|sample|testdata|kube-openapi" |
    paste -sd,)
"$work/openapi-gen" -O zz_generated.openapi -h hack/boilerplate/boilerplate.generatego.txt \
    -p k8s.io/kubernetes/pkg/generated/openapi -i "$kinds" -o "$work/gopath/src" -r "$work/violations"
version=k8s.io/component-base/version
for program in kube-apiserver kube-controller-manager kube-scheduler; do
    # Without the clouds' own parts, which are most of it.
    $go build -tags providerless -ldflags "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20" \
        -o "$folder/bin/$program.new" "./cmd/$program"
    mv "$folder/bin/$program.new" "$folder/bin/$program"
done
rm -rf "$work"
