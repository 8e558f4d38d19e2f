#!/usr/bin/env bash
# Kubernetes v1.37.1, the ResourceClaim controller of kube-controller-manager: a claim that is being deleted and is reserved for
# a pod is looked at again when that pod goes, but only if the pod's spec names the claim. The API accepts `reservedFor` with any
# pod (KEP-4381), and the controller does drop the reservation of a pod that is gone, at the next change of the claim.
#
# Seen with v1.37.1: both claims are deleted, then both pods. The claim that its pod names is gone a second later; the other one
# keeps reservation and finalizer until something writes it. Who reserves claims for pods that do not name them has to write
# such a claim once after the pod.
#
# Needs Go 1.26 or later (or GOTOOLCHAIN=auto), curl and jq; builds kube-apiserver, kube-controller-manager and etcd. Exits 1 if
# the behavior changes.
set -euo pipefail
version=1.37.1
work=$(mktemp -d)
started=()
finish() {
  for process in "${started[@]}"; do kill "$process" 2>/dev/null || true; done
  wait
  chmod -R u+w "$work"
  rm -rf "$work"
}
trap finish EXIT
cd "$work"

# The modules of Kubernetes' own repository have versions 0.x of their own.
go mod init kubernetes >log 2>&1
source=$(go mod download -json "k8s.io/kubernetes@v$version" | jq -r .GoMod)
go mod edit -json "$source" | jq -r '.Replace[].Old.Path' | while read -r module; do
  go mod edit -replace "$module=$module@v0.${version#1.}"
done
go get "k8s.io/kubernetes@v$version" go.etcd.io/etcd/server/v3@v3.7.0 >>log 2>&1 || { cat log; exit 1; }
for program in k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-controller-manager go.etcd.io/etcd/server/v3; do
  go build -mod=mod -o "$(basename "${program%/v3}")" "$program" >>log 2>&1 || { cat log; exit 1; }
done

base=$((20000 + RANDOM % 20000))
etcd=http://127.0.0.1:$base peer=http://127.0.0.1:$((base + 1)) server=https://127.0.0.1:$((base + 2))
openssl genrsa -out key 2048 2>>log
echo "token,admin,admin,system:masters" >tokens
cat >kubeconfig <<YAML
{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
 clusters: [{name: c, cluster: {server: $server, insecure-skip-tls-verify: true}}], users: [{name: u, user: {token: token}}]}
YAML
./server --data-dir data --listen-client-urls "$etcd" --advertise-client-urls "$etcd" --listen-peer-urls "$peer" \
  --initial-advertise-peer-urls "$peer" --initial-cluster "default=$peer" >etcd.log 2>&1 &
started+=($!)
./kube-apiserver --etcd-servers "$etcd" --bind-address 127.0.0.1 --secure-port $((base + 2)) --cert-dir certs \
  --service-account-issuer https://issuer --service-account-key-file key --service-account-signing-key-file key \
  --service-cluster-ip-range 10.0.0.0/24 --token-auth-file tokens --disable-admission-plugins ServiceAccount >api.log 2>&1 &
started+=($!)
call() { curl -skf -H "Authorization: Bearer token" -H "Content-Type: ${2:-application/json}" "${@:3}" "$server$1"; }
until call /readyz >/dev/null; do kill -0 "${started[@]}"; sleep 1; done
./kube-controller-manager --kubeconfig kubeconfig --controllers resourceclaim-controller --leader-elect=false \
  --secure-port 0 >manager.log 2>&1 &
started+=($!)

merge=application/merge-patch+json
pods=/api/v1/namespaces/default/pods claims=/apis/resource.k8s.io/v1/namespaces/default/resourceclaims
for name in named unnamed; do
  call $claims "" -d "{\"metadata\": {\"name\": \"$name\"}, \"spec\": {\"devices\": {\"requests\": [
    {\"name\": \"r\", \"exactly\": {\"deviceClassName\": \"any\"}}]}}}" >/dev/null
  uses=$([ $name = named ] && echo '"resourceClaims": [{"name": "c", "resourceClaimName": "named"}],' || true)
  uid=$(call $pods "" -d "{\"metadata\": {\"name\": \"$name\"}, \"spec\": {$uses \"containers\": [
    {\"name\": \"c\", \"image\": \"i\"}]}}" | jq -r .metadata.uid)
  call $claims/$name $merge -X PATCH -d '{"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}}' >/dev/null
  call $claims/$name/status $merge -X PATCH -d "{\"status\": {
    \"allocation\": {\"devices\": {\"results\": [{\"request\": \"r\", \"driver\": \"any.example\", \"pool\": \"p\", \"device\": \"d\"}]}},
    \"reservedFor\": [{\"resource\": \"pods\", \"name\": \"$name\", \"uid\": \"$uid\"}]}}" >/dev/null
  call $claims/$name "" -X DELETE >/dev/null
done
sleep 3
for name in named unnamed; do call "$pods/$name?gracePeriodSeconds=0" "" -X DELETE >/dev/null; done
list() { call $claims "" | jq -r '[.items[] | "\(.metadata.name) reserved for \(.status.reservedFor | length)"] | join(", ")'; }
sleep 20
echo "20 s after the pods: $(list)" | tee seen
call $claims/unnamed $merge -X PATCH -d '{"metadata": {"annotations": {"a": "b"}}}' >/dev/null
sleep 5
echo "after a write: $(list)" | tee -a seen
cat >expected <<'OUT'
20 s after the pods: unnamed reserved for 1
after a write: 
OUT
diff expected seen || { echo "the behavior has changed"; exit 1; }
echo "kube-controller-manager v$version leaves a deleted claim reserved for a pod that is gone and did not name it"
