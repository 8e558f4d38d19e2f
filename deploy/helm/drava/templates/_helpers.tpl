{{- define "drava.labels" -}}
app.kubernetes.io/name: drava
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Labels of the pods of one component: (dict "root" $ "component" "driver"). */}}
{{- define "drava.selector" -}}
app.kubernetes.io/name: drava
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Image reference: (dict "root" $ "component" "controller"). `global.imageRegistry` precedes `image.registry`. */}}
{{- define "drava.image" -}}
{{- $values := .root.Values }}
{{- with (($values.global).imageRegistry) | default $values.image.registry }}{{ . }}/{{ end -}}
{{ (get $values .component).image }}:{{ $values.image.tag | default .root.Chart.AppVersion }}
{{- with get (($values.image).digests | default dict) .component }}@{{ . }}{{ end }}
{{- end }}

{{/* Image of the pod of `helm test`. `global.imageRegistry` replaces its registry. */}}
{{- define "drava.testImage" -}}
{{- with (.Values.global).imageRegistry }}{{ . }}/{{ regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $.Values.test.image "" }}
{{- else }}{{ .Values.test.image }}{{ end }}
{{- end }}

{{/* Tolerations of pods on nodes with GPUs: those of `driver.tolerations` and of `compatibility.nodes.taints`. */}}
{{- define "drava.nodeTolerations" -}}
{{- $tolerations := .Values.driver.tolerations | default list }}
{{- range ((.Values.compatibility).nodes).taints }}
{{- $tolerations = append $tolerations (dict "key" . "operator" "Exists") }}
{{- end }}
{{- with $tolerations }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* Affinity of the node driver: nodes with the labels of `driver.nodeSelector`, or with one of `compatibility.nodes.labels`. */}}
{{- define "drava.nodeAffinity" -}}
{{- $labels := ((.Values.compatibility).nodes).labels }}
{{- if not $labels }}
{{- with .Values.driver.affinity }}{{ toYaml . }}{{ end }}
{{- else }}
{{- if dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "" (.Values.driver.affinity | default dict) }}
{{- fail "compatibility.nodes.labels and a required nodeAffinity in driver.affinity exclude each other" }}
{{- end }}
{{- $own := list }}
{{- range $key, $value := .Values.driver.nodeSelector }}
{{- $own = append $own (dict "key" $key "operator" "In" "values" (list $value)) }}
{{- end }}
{{- $terms := list }}
{{- with $own }}{{ $terms = append $terms (dict "matchExpressions" .) }}{{ end }}
{{- range $labels }}
{{- $parts := splitn "=" 2 . }}
{{- $terms = append $terms (dict "matchExpressions" (list (dict "key" $parts._0 "operator" "In" "values" (list $parts._1)))) }}
{{- end }}
{{- $required := dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) }}
{{- mergeOverwrite (dict "nodeAffinity" $required) (.Values.driver.affinity | default dict) | toYaml }}
{{- end }}
{{- end }}

{{/* Pod that removes the files of the node driver after its end. The uninstall hook runs it on each node. */}}
{{- define "drava.nodeCleanupPod" -}}
metadata:
  labels:
    app.kubernetes.io/name: drava
    app.kubernetes.io/instance: {{ .Release.Name }}
    app.kubernetes.io/component: uninstall
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  {{- if .Values.openshift.enabled }}
  serviceAccountName: drava-uninstall
  {{- end }}
  tolerations: [{operator: Exists}]
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: remove-files
      image: {{ include "drava.image" (dict "root" . "component" "driver") }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [drava-dra-driver]
      args:
        - --node-name=unused
        - --kubelet-dir=/host/kubelet
        - --cdi-dir=/host/cdi
        - --state-dir=/host/state/{{ base .Values.driver.stateDir }}
        - --run-dir=/host/run/drava
        - remove-files
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: [DAC_OVERRIDE]}
      volumeMounts:
        - {name: plugins, mountPath: /host/kubelet/plugins}
        - {name: plugins-registry, mountPath: /host/kubelet/plugins_registry}
        - {name: cdi, mountPath: /host/cdi}
        - {name: state, mountPath: /host/state}
        - {name: run, mountPath: /host/run}
  volumes:
    - {name: plugins, hostPath: {path: {{ .Values.driver.kubeletDir }}/plugins}}
    - {name: plugins-registry, hostPath: {path: {{ .Values.driver.kubeletDir }}/plugins_registry}}
    - {name: cdi, hostPath: {path: {{ .Values.driver.cdiDir }}}}
    - {name: state, hostPath: {path: {{ dir (clean .Values.driver.stateDir) }}}}
    - {name: run, hostPath: {path: /run}}
{{- end }}
